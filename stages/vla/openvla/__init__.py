"""OpenVLA and OpenVLA-OFT: networks, policies, files and adapters."""

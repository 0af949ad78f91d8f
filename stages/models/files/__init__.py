"""Files of parameters, in the formats of Hugging Face and of PEFT."""

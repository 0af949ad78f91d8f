"""Tests here make many stages that differ in a setting or two."""

import shared_stages

shared = shared_stages.of_a_module  # The fixture.

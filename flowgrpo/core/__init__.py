"""Config, errors, seeds, files and devices, which all other wings build on."""

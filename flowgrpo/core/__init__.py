"""What everything else stands on: config, errors, seeds, files, devices. Imports nothing of ours."""

"""Code that rewards share: image conversion and the models that they score with."""

from PIL import ImageStat


def saturation(images, prompts, **columns):
    return [ImageStat.Stat(image.convert("HSV")).mean[1] / 255 for image in images]

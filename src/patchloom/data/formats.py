"""Which files are images, and which recordings, by the end of their names."""

from __future__ import annotations

from importlib.util import find_spec

_ALWAYS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".npy"})
HEIF = frozenset({".heic", ".heif", ".hif"})
DICOM = frozenset({".dcm", ".dicom"})
SOUND = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"})
# the extra by which each is read, and the module that it installs
_MODULES = {"heic": "pillow_heif", "dicom": "pydicom", "audio": "soundfile"}
EXTRAS = dict.fromkeys(HEIF, "heic") | dict.fromkeys(DICOM, "dicom") | dict.fromkeys(SOUND, "audio")
_READ = {suffix for suffix, extra in EXTRAS.items() if find_spec(_MODULES[extra]) is not None}

SOUND_SUFFIXES = SOUND & _READ
IMAGE_SUFFIXES = _ALWAYS | _READ - SOUND

# not read, but somebody who put them into a folder of images or recordings may expect it: they are counted
_PICTURES = """.avif .jxl .jp2 .j2k .jpx .jpf .jfif .jpe .apng .svg .psd .xcf .ico .tga .ppm .pgm .pbm .pnm .pfm .exr
    .hdr .pcx .sgi .qoi .dds"""
_RAW = ".raw .dng .cr2 .cr3 .nef .arw .orf .rw2 .raf .srw .pef"
_SCIENCE = """.nii .mha .mhd .nrrd .svs .ndpi .mrxs .scn .bif .czi .lif .nd2 .vsi .oib .oir .ims .fits .fit
    .h5 .hdf5 .npz"""
_FILMS = ".mp4 .mov .m4v .avi .mkv .webm .mpg .mpeg .wmv .3gp .mts"
_OTHER_SOUND = ".m4a .aac .wma .amr .aif .aiff .au .caf .sph .ape .wv"
LOOK_ALIKES = frozenset(f"{_PICTURES} {_RAW} {_SCIENCE} {_FILMS} {_OTHER_SOUND}".split())

"""The formats of an export, one file each: `write` makes the files of a format, `verify` reads them back."""

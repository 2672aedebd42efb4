"""Files and batches on the disk, and the order in which the lines of batches run."""

"""Samples in shards: tar, zip, MDS, TFRecord and Parquet files, each sample read by its byte range."""

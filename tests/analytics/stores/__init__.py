"""An S3 server and HDFS for tests, on loopback, from packages that `make .s3 .hdfs` installs."""

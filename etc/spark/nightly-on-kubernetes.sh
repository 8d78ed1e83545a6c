#!/bin/sh
# Runs the nightly analysis as a pod of Kubernetes, with logs and results on S3:
#
#   API=https://10.0.0.1:6443 IMAGE=registry.example/mediatord-analytics:1 REGION=eu-central-1 \
#     nightly-on-kubernetes.sh --logs s3a://logs/mediator --out s3a://analysis/mediator --keys /keys/pseudonyms.keys
#
# The image has Spark, mediatord[analytics] in /opt/mediatord, and the jars of hadoop-aws for Spark's Hadoop. In the
# namespace are the service account `analytics`, which may create pods, the volume claim `analytics-keys` for the file
# of pseudonym keys, which the analysis writes, and the secret `analytics-s3` with `id` and `key`.
# Python and DuckDB need memory beside Java: hence the overhead. A pod that was killed holds the lock of the results
# for 24 hours; the next run names the file to delete.
set -eu

claim=spark.kubernetes.driver.volumes.persistentVolumeClaim.keys
exec "${SPARK_HOME:?}/bin/spark-submit" --master "k8s://${API:?}" --deploy-mode cluster --name mediatord-analytics \
    --conf "spark.kubernetes.namespace=${NAMESPACE:-analytics}" \
    --conf "spark.kubernetes.container.image=${IMAGE:?}" \
    --conf spark.kubernetes.authenticate.driver.serviceAccountName=analytics \
    --conf spark.kubernetes.submission.waitAppCompletion=false \
    --conf "$claim.options.claimName=analytics-keys" \
    --conf "$claim.mount.path=/keys" \
    --conf spark.kubernetes.driver.secretKeyRef.AWS_ACCESS_KEY_ID=analytics-s3:id \
    --conf spark.kubernetes.driver.secretKeyRef.AWS_SECRET_ACCESS_KEY=analytics-s3:key \
    --conf spark.kubernetes.executor.secretKeyRef.AWS_ACCESS_KEY_ID=analytics-s3:id \
    --conf spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY=analytics-s3:key \
    --conf "spark.executor.instances=${EXECUTORS:-2}" \
    --conf spark.executor.memory=2g \
    --conf spark.driver.memory=1g \
    --conf spark.driver.memoryOverhead=1g \
    --conf "spark.hadoop.fs.s3a.endpoint.region=${REGION:?}" \
    local:///opt/mediatord/analytics/__main__.py nightly "$@"

"""Spark's UI shows the purposes of a consumer's jobs."""

from coranto_consumers.spark.session.sessions import described

KEY = "spark.job.description"


def test_a_job_description_applies_within_its_block(spark):
    context = spark.sparkContext
    before = context.getLocalProperty(KEY)
    with described(spark, "delays: reads 10 bytes"):
        assert context.getLocalProperty(KEY) == "delays: reads 10 bytes"
        with described(spark, "another"):
            assert context.getLocalProperty(KEY) == "another"
        assert context.getLocalProperty(KEY) == "delays: reads 10 bytes"
    assert context.getLocalProperty(KEY) == before

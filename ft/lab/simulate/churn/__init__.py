"""Simulate a pipeline that loses whole stages, under the strategies of CheckFree, table 2 (``ft simulate churn``)."""

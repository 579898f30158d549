"""``ft simulate churn``: a pipeline that loses whole stages, by four strategies (CheckFree's Table 2)."""

class Metric:
    def __init__(
        self,
        key,
        value,
        timestamp,
        step,
        model_id=None,
        dataset_name=None,
        dataset_digest=None,
        run_id=None,
    ):
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step


class Param:
    def __init__(self, key, value):
        self.key, self.value = key, str(value)

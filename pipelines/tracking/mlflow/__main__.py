"""`python -m pipelines.tracking.mlflow LOG` ships the rest of LOG to MLFLOW_TRACKING_URI."""

import sys

from pipelines.tracking.mlflow.shipper import main

if __name__ == "__main__":
    sys.exit(main())

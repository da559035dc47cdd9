"""Mirror a run in MLflow: `python -m pipelines.verbs.mirror STORE RUN HOME`, which `skytrain run` starts."""

import sys

from pipelines.provenance import code_tags
from pipelines.tracking.mlflow.child import mirror_until_end

if __name__ == "__main__":
    sys.exit(mirror_until_end(code_tags()))

"""A small price catalog in SkyPilot's format on disk, with round prices: no account and no network are needed.

Call `write_catalog(home)`, then start a process with `sky_environment(home)` that imports `sky`.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

V8 = Path(".sky/catalogs/v8")  # the schema of SkyPilot 0.14, which never refreshes a catalog that it did not download


@dataclass(frozen=True)
class Row:
    """An instance type in a zone. Prices in dollars an hour of the whole machine; spot None: not offered."""

    cloud: str
    instance: str
    region: str
    zone: str
    usd: float
    spot_usd: float | None = None
    gpus: str = ""  # "H100:8"
    vcpus: float = 16.0
    memory_gib: float = 64.0


ROWS = (
    Row("aws", "p5.48xlarge", "us-east-1", "use1-az4", 56.0, 24.0, "H100:8", 192, 2048),
    Row("aws", "p5.48xlarge", "us-east-1", "use1-az6", 56.0, 20.0, "H100:8", 192, 2048),
    Row("aws", "p5.48xlarge", "us-west-2", "usw2-az1", 60.0, 22.0, "H100:8", 192, 2048),
    Row("aws", "p5e.48xlarge", "us-east-2", "use2-az1", 64.0, 32.0, "H200:8", 192, 2048),
    Row("aws", "p4de.24xlarge", "us-east-1", "use1-az4", 28.0, 12.0, "A100-80GB:8", 96, 1152),
    Row("aws", "m6i.4xlarge", "us-east-1", "use1-az4", 0.8, 0.3),
    Row("aws", "m6i.4xlarge", "us-west-2", "usw2-az1", 0.9, 0.4),
    Row("aws", "c6i.4xlarge", "us-east-1", "use1-az4", 0.7, 0.25, "", 16, 32),
    Row("aws", "g6.xlarge", "us-east-1", "use1-az4", 0.8, 0.4, "L4:1", 4, 16),
    Row("aws", "m6i.xlarge", "us-east-1", "use1-az4", 0.2, 0.08, "", 4, 16),
    Row("gcp", "a3-highgpu-8g", "us-central1", "us-central1-a", 72.0, 26.0, "H100:8", 208, 1872),
    Row("gcp", "n2-standard-16", "us-central1", "us-central1-a", 0.7, 0.2),
    Row("lambda", "gpu_8x_h100_sxm5", "us-east-1", "", 31.92, None, "H100:8", 208, 1800),
    Row("lambda", "gpu_1x_h100_sxm5", "us-east-1", "", 3.29, None, "H100:1", 26, 225),
    Row("lambda", "gpu_1x_a10", "us-east-1", "", 0.75, None, "A10:1", 30, 200),
    Row("lambda", "cpu_16x_general", "us-east-1", "", 0.64),
    Row("nebius", "cpu-d3_16vcpu-64gb", "eu-north1", "", 0.4),
    Row("nebius", "gpu-h100-sxm_1gpu-16vcpu-200gb", "eu-north1", "", 2.95, 1.25, "H100:1", 16, 200),
    Row("nebius", "gpu-h100-sxm_8gpu-128vcpu-1600gb", "eu-north1", "", 23.6, 10.0, "H100:8", 128, 1600),
    Row("runpod", "cpu3g-16-64", "CA", "CA-MTL-1", 0.64),
    Row("runpod", "1x_L4_SECURE", "CA", "CA-MTL-1", 0.39, None, "L4:1", 12, 50),
    Row("runpod", "8x_H100_SECURE", "CA", "CA-MTL-1", 19.12, 15.0, "H100:8", 128, 1408),
)
COLUMNS = {
    "aws": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone,Arch",
    "gcp": "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,"
    "SpotPrice",
    "lambda": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
    "nebius": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
    "runpod": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,AvailabilityZone,"
    "GpuInfo",
}
EMPTY = {  # other files that the clouds' modules read
    "aws/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId",
    "aws/instance_quota_mapping.csv": "InstanceType,OnDemandInstanceQuotaCode,SpotInstanceQuotaCode",
    "gcp/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate",
    "gcp/accelerator_quota_mapping.csv": "Accelerator,OnDemandInstanceCode,SpotInstanceCode",
}


def write_catalog(home: Path, rows: tuple[Row, ...] = ROWS) -> None:
    """Write the catalog to SkyPilot's folder under `home`."""
    for cloud, header in COLUMNS.items():
        values = [line for row in rows if row.cloud == cloud for line in lines_of(row)]
        write_csv(home / V8 / cloud / "vms.csv", header.split(","), values)
    for name, header in EMPTY.items():
        write_csv(home / V8 / name, header.split(","), [])
    gpus = sorted({row.gpus.partition(":")[0] for row in rows if row.gpus})
    clouds = {gpu: sorted({r.cloud for r in rows if r.gpus.startswith(f"{gpu}:")}) for gpu in gpus}
    common: list[dict[str, object]] = [{"AcceleratorName": gpu, "Clouds": str(names)} for gpu, names in clouds.items()]
    write_csv(home / V8 / "common" / "accelerators.csv", ["AcceleratorName", "Clouds"], common)


def lines_of(row: Row) -> list[dict[str, object]]:
    """The lines of a row. GCP sells a machine and its GPUs apart: two lines, the machine has a quarter of the price."""
    gpu, _, count = row.gpus.partition(":")
    memory = {"Name": gpu, "Manufacturer": "NVIDIA", "Count": count, "MemoryInfo": {"SizeInMiB": 81_920}}
    region = {"Region": row.region, "AvailabilityZone": row.zone, "Arch": "x86_64"}
    machine = {"InstanceType": row.instance, "vCPUs": row.vcpus, "MemoryGiB": row.memory_gib}
    gpus = {"AcceleratorName": gpu, "AcceleratorCount": count and float(count), "GpuInfo": str({"Gpus": [memory]})}
    if not gpu:
        return [region | machine | prices(row, 1.0)]
    if row.cloud == "gcp":
        return [region | machine | prices(row, 0.25), region | gpus | prices(row, 0.75)]
    return [region | machine | gpus | prices(row, 1.0)]


def prices(row: Row, share: float) -> dict[str, object]:
    return {"Price": share * row.usd, "SpotPrice": "" if row.spot_usd is None else share * row.spot_usd}


def write_csv(path: Path, header: list[str], rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, header, restval="", extrasaction="ignore")
        out.writeheader()
        out.writerows(rows)


def sky_environment(home: Path) -> dict[str, str]:
    """The environment of a process whose SkyPilot uses that catalog and finds no cloud account."""
    nowhere = str(home / "none")
    return {
        "HOME": str(home),
        "SKY_RUNTIME_DIR": str(home),
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "AWS_CONFIG_FILE": nowhere,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }

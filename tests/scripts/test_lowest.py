"""The constraints with which `scripts/versions.sh lowest` installs."""

from scripts.lowest import lowest

PROJECT = {
    "dependencies": ["torch>=2.10", "pyyaml>=6.0"],
    "optional-dependencies": {
        "train": ["pyarrow>=17"],
        "mlflow": ["mlflow-skinny>=3.1", "megafrontier[train]"],
        "test": ["pytest>=8", "megafrontier[train]"],
        "dev": ["ruff>=0.9", "triton>=3.4; platform_system == 'Linux'"],
    },
}


def test_packages_have_their_lower_bound_and_the_tools_of_developers_the_tested_version() -> None:
    constraints = ["# Tested.", "torch==2.13.0", "pyarrow==26.0.1", "pytest==9.2.0", "ruff==0.17.5"]
    assert lowest(PROJECT, constraints) == [
        "torch==2.10",
        "pyyaml==6.0",
        "pyarrow==17",
        "mlflow-skinny==3.1",
        "# Tested.",
        "pytest==9.2.0",
        "ruff==0.17.5",
    ]

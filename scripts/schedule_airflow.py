"""A queue of notebooks as a DAG of Apache Airflow (2.4 or newer, standard provider): one task that calls `hsmoe schedule`.

The file has been parsed, and has not been run: Airflow is no part of the environment that hsmoe is tested in. Put it into the DAGs folder, and set the two variables for the workers:
  HSMOE_ROOT    the repository
  HSMOE_QUEUE   the queue's YAML file, as seen from there
A task that Airflow tries again goes on where the one before it stopped; one whose time is over gets SIGTERM, and the run that it executes saves.
"""
import os, shlex
from datetime import datetime, timedelta

from airflow import DAG
from airflow.operators.bash import BashOperator

ROOT, QUEUE = os.environ.get("HSMOE_ROOT", "/srv/hsmoe"), os.environ.get("HSMOE_QUEUE", "scripts/schedule.yaml")

with DAG(dag_id="hsmoe_queue", start_date=datetime(2026, 1, 1), schedule=None, catchup=False, max_active_runs=1, tags=["hsmoe"]) as dag:
    BashOperator(
        task_id="schedule",
        bash_command=f"set -e; cd {shlex.quote(ROOT)}; source scripts/env.sh; exec python -m hsmoe.cli schedule {shlex.quote(QUEUE)} --folder runs/airflow-{{{{ ds }}}}",
        retries=2,
        retry_delay=timedelta(minutes=5),
        execution_timeout=timedelta(hours=12),
        append_env=True,
    )

"""A model spread over devices: in one process with `ModelPipeline`, over processes with `DistributedPipeline`.

Both follow one `LayoutSpec`: which units make which stage, on which device, under which budget.
"""

from recals_exp.pipeline.distributed import DistributedPipeline, StepResult
from recals_exp.pipeline.launch import RankError, join_ranks, launch
from recals_exp.pipeline.layout import Layout, LayoutSpec, StageLayout, build_pipeline, format_layout, plan_layout
from recals_exp.pipeline.module import ModelPipeline
from recals_exp.pipeline.process_spec import SCHEDULES, ProcessSpec, cell_seed, generator_digest, schedule_orders
from recals_exp.pipeline.schedule import (
    Timetable,
    format_grid,
    forward_orders,
    ideal_bubble,
    ideal_efficiency,
    simulate,
)
from recals_exp.pipeline.timeline import Event, StageMeasure, Timeline, draw_timeline, record, stage_measures
from recals_exp.pipeline.workers import ThreadOrderError

__all__ = [
    "SCHEDULES",
    "DistributedPipeline",
    "Event",
    "Layout",
    "LayoutSpec",
    "ModelPipeline",
    "ProcessSpec",
    "RankError",
    "StageLayout",
    "StageMeasure",
    "StepResult",
    "ThreadOrderError",
    "Timeline",
    "Timetable",
    "build_pipeline",
    "cell_seed",
    "draw_timeline",
    "format_grid",
    "format_layout",
    "forward_orders",
    "generator_digest",
    "ideal_bubble",
    "ideal_efficiency",
    "join_ranks",
    "launch",
    "plan_layout",
    "record",
    "schedule_orders",
    "simulate",
    "stage_measures",
]

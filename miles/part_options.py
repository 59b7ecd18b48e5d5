"""From the configuration to the options of each part; the assembly calls these, each part sees its own options only."""

from __future__ import annotations

from pathlib import Path

from controllers.inference_controller import FleetOptions, HealthOptions
from executors.rollout_executor import RolloutOptions
from executors.sampling_client import SamplingParams
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions, OverlongOptions
from miles.cluster.ray_cluster import RayOptions
from miles.config import RunConfig
from miles.engines.launcher import ANSWER_MARGIN_S, HOST_START_TIMEOUT_S, LauncherOptions
from miles.models.folder import ModelInfo
from miles.models.tokenizer import Tokenizer
from miles.trainer.faults import FaultOptions
from miles.trainer.options import TrainerOptions
from miles.weight_sync.options import WeightSyncOptions

WEIGHT_LOADER = "miles.weight_sync.agent.load"
LOG_FOLDER = "logs"
BARREN_STEPS = 20
"""Steps' worth of groups that may be filtered, dropped or failed in a row before a run gives up."""


def ray_options(config: RunConfig) -> RayOptions:
    """Of the Ray cluster."""
    return RayOptions(address=config.cluster.address, object_store_bytes=config.cluster.object_store_mb * 1024 * 1024)


def launcher_options(config: RunConfig, model_path: Path, folder: Path) -> LauncherOptions:
    """Of the engines, whose files go below `folder`."""
    engines = config.engines
    ports = () if engines.port is None else tuple(range(engines.port, engines.port + engines.count))
    return LauncherOptions(
        model_path=model_path.resolve(),
        log_dir=(folder / LOG_FOLDER).resolve(),
        kind=engines.kind,
        ports=ports,
        weight_loader=WEIGHT_LOADER,
        max_running_requests=engines.max_concurrency,
        seed=config.run.seed,
        args=engines.args,
        launch_timeout_s=engines.launch_timeout_s,
    )


def fleet_options(config: RunConfig) -> FleetOptions:
    """Of the controller."""
    engines, health = config.engines, config.engines.health
    return FleetOptions(
        count=engines.count,
        max_concurrency=engines.max_concurrency,
        restart_budget=engines.restart.budget,
        restart_backoff_s=engines.restart.backoff_s,
        # Beyond the launcher's own deadline, whose error holds the last lines that the engine printed.
        launch_timeout_s=engines.launch_timeout_s + HOST_START_TIMEOUT_S + ANSWER_MARGIN_S,
        sync_timeout_s=engines.sync_timeout_s,
        drain_timeout_s=config.inference.drain_timeout_s,
        max_unavailable=config.inference.max_unavailable,
        stop_grace_s=engines.stop_grace_s,
        health=HealthOptions(
            interval_s=health.interval_s,
            timeout_s=health.timeout_s,
            failures=health.failures,
            startup_grace_s=health.startup_grace_s,
        ),
    )


def trainer_options(config: RunConfig, model_path: Path) -> TrainerOptions:
    """Of every trainer rank."""
    trainer, optimizer = config.trainer, config.trainer.optimizer
    return TrainerOptions(
        model_path=model_path.resolve(),
        seed=config.run.seed,
        dtype=trainer.dtype,
        lr=optimizer.lr,
        lr_warmup_steps=optimizer.warmup_steps,
        lr_schedule=optimizer.schedule,
        lr_decay_steps=config.train.steps,
        lr_final_fraction=optimizer.final_fraction,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        micro_batch_tokens=trainer.micro_batch_tokens,
        temperature=config.rollout.temperature,
        threads=trainer.threads,
        algorithm=algorithm_options(config),
        parallel=trainer.parallel_sizes(),
        device=trainer.device,
        recompute=trainer.recompute,
        skip_grad_norm=trainer.skip_grad_norm,
        start_timeout_s=trainer.start_timeout_s,
        call_timeout_s=trainer.call_timeout_s,
    )


def fault_options(config: RunConfig, folder: Path) -> FaultOptions:
    """Of the trainer's driver, which keeps batches below `folder`."""
    trainer = config.trainer
    return FaultOptions(
        rebuilds=trainer.rebuilds,
        folder=folder.resolve(),
        keep_batches=config.debug.dump_batches,
        bad_steps=trainer.bad_steps,
        max_bad_steps_in_a_row=trainer.max_bad_steps_in_a_row,
    )


def algorithm_options(config: RunConfig) -> AlgorithmOptions:
    """Of the advantages and the loss."""
    algorithm = config.algorithm
    kl, correction, overlong = algorithm.kl, algorithm.correction, algorithm.overlong
    clip = {} if algorithm.clip is None else {"clip": algorithm.clip}
    return AlgorithmOptions(
        advantage=algorithm.advantage,
        advantage_options=algorithm.advantage_options,
        loss=algorithm.loss,
        loss_options=algorithm.loss_options | clip,
        aggregation=algorithm.aggregation,
        max_tokens=config.rollout.max_tokens,
        kl=None if kl is None else KlOptions(kl.coefficient, kl.estimator, kl.place, kl.gradient),
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=None if correction is None else CorrectionOptions(**dict(correction)),
        overlong=None if overlong is None else OverlongOptions(overlong.buffer, overlong.penalty),
        max_token_staleness=algorithm.max_token_staleness,
    )


def weight_sync_options(config: RunConfig, folder: Path) -> WeightSyncOptions:
    """Of the sync service, whose disk transport writes below `folder`."""
    sync = config.weight_sync
    return WeightSyncOptions(
        transport=sync.transport,
        mode=sync.mode,
        max_updating=sync.max_updating,
        n_slots=sync.n_slots,
        pull_timeout_s=sync.pull_timeout_s,
        vote_timeout_s=sync.vote_timeout_s,
        audit_every=sync.audit_every,
        folder=(folder / "weights").resolve(),
    )


def rollout_options(config: RunConfig, model: ModelInfo, tokenizer: Tokenizer) -> RolloutOptions:
    """Of the executor."""
    rollout = config.rollout
    return RolloutOptions(
        group_size=rollout.group_size,
        groups_per_step=config.train.groups_per_step,
        sampling=SamplingParams(
            max_new_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tokenizer.eos_ids,
            return_sampling_mask=rollout.sampling_mask,
            return_routed_experts=rollout.routing_replay,
        ),
        max_context=model.context_length,
        max_staleness=rollout.max_staleness,
        partial=rollout.partial,
        filter_zero_variance=rollout.filter_zero_variance,
        max_retries=rollout.max_retries,
        request_timeout_s=rollout.request_timeout_s,
        max_barren_groups=BARREN_STEPS * config.train.groups_per_step,
    )

"""Every knob with its default and meaning, and which of them may differ when a run is resumed."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "path": "tiny",  # a built-in name, a Hugging Face folder or id, or a GGUF file
        "init": "load",  # load the weights of path, or random: new ones from train.seed
        "ref_path": "",  # the reference of the KL; "" = the starting weights
        "critic_path": "",  # start of the critic's weights; "" = the policy's
        "teacher_path": "",  # the teacher of algo.opd_kl_coef, of the same tokenizer
        "compute_dtype": "auto",  # auto (bfloat16 on accelerators, float32 on CPU), bfloat16, float32
        "remat": "auto",  # what the backward pass makes again: auto (dots on a CPU, else full), none, dots, full
        "chat_template": True,  # text prompts become one user message, where the tokenizer has a template
        "chat_template_kwargs": "{}",  # JSON object handed to the template, such as {"enable_thinking": false}
        "trainable": ".*",  # regex on leaf names: what is trained
        "frozen": "",  # regex on leaf names: what is not, even if trainable; "" = nothing
    },
    "data": {
        "prompt_data": "builtin:sums/train.jsonl",  # JSONL, Parquet, path@[a:b], hub id, builtin:FILE, or a mixture:
        # 0.7*a.jsonl + 0.3*b.jsonl; or reasoning_gym:TASK?size=1000&seed=1
        "input_key": "prompt",  # column of the prompt: text or chat messages
        "label_key": "label",  # column of the label; "" = none: with sft the prompts are then whole conversations
        "metadata_key": "metadata",  # column of the metadata object
        "tool_key": "tools",  # column of the tool descriptions
        "prompt_suffix": "",  # text behind every prompt, such as an instruction
        "shuffle": True,  # a new order in every epoch
        "seed": 42,  # of that order
        "max_prompt_len": 0,  # tokens; longer prompts are dropped and counted; 0 = the largest prompt bucket
    },
    "rollout": {
        "batch_size": 32,  # prompts per rollout
        "n_samples_per_prompt": 8,  # responses per prompt: the group
        "num_rollouts": 100,  # length of the run
        "num_epochs": 0,  # length of the run in passes over the data instead; 0 = use num_rollouts
        "max_response_len": 1024,  # tokens
        "temperature": 1.0,  # divides the logits, here and in the trainer; > 0
        "top_p": 1.0,  # smallest set of tokens with this probability; 1 = off
        "top_k": 0,  # the k likeliest tokens; 0 or -1 = off
        "min_p": 0.0,  # drop tokens below this share of the likeliest one; 0 = off
        "min_new_tokens": 0,  # no end before
        "logit_bias": "{}",  # JSON: token id -> what is added to its logit; moves draws, not recorded log-probs
        "stop": (),  # texts that end a response
        "stop_token_ids": (),  # ids that end a response, beside those of the model
        "over_sampling_batch_size": 0,  # prompts in flight; 0 = batch_size, and never below it
        # Interrupted samples keep their tokens and go on in the next rollout; some are interrupted where
        # over_sampling_batch_size is larger than batch_size.
        "partial": False,
        "mask_offpolicy_in_partial": False,  # what older weights drew of them is not trained
        "max_version_lag": 0,  # rollouts; samples with an older token start again; 0 = no limit
        # Groups that are kept: reward_std, not_all_right, not_all_wrong, not_all_truncated, or
        # package.module:function(group); "" = all
        "dynamic_filter": "",
        "max_filter_rounds": 10,  # times over_sampling_batch_size groups are tried; then what was kept is trained
        "sample_filter": "",  # of the same kind, for lists of one sample: others stay in their group, untrained
        "buffer_filter": "",  # of the same kind, for interrupted groups: others are forgotten
    },
    "sampler": {
        "slots": 0,  # responses decoded at once; 0 = auto
        "cache_tokens": 0,  # positions of the key-value cache, of all slots together; 0 = auto. Where it runs out, the
        # youngest responses give way: they keep their tokens, and go on later
        "prefill_chunk": 0,  # tokens of one prefill program: short prompts go together, a long one in parts;
        # 0 = auto: 4096, on a CPU 512
        "prompt_buckets": (64, 128, 256, 512, 1024, 2048),  # padded prompt lengths, tokens
        "length_buckets": (256, 512, 1024, 2048, 4096, 8192),  # cache lengths: prompt and response, tokens
        "steps_per_dispatch": 16,  # tokens per slot between two looks of the host
        "dtype": "auto",  # of the sampler's products: auto (as compute_dtype), bfloat16, float32
        "weight_dtype": "auto",  # auto (as sampler.dtype), or int8 with a scale for each output
        "cache_dtype": "auto",  # auto (as sampler.dtype), bfloat16, float32, or int8 with a scale for each head
        "top_logprobs": 0,  # likeliest tokens whose log-probs requests may ask for, at each step
        "warmup": True,  # compile all of the sampler's programs before the first rollout
    },
    "reward": {
        "type": "math",  # math, gsm8k, dapo, exact_match, f1, format, dcpo, remote, random,
        # reasoning_gym, or package.module:function; a row's metadata.rm_type may name another for it
        "key": "reward",  # the part that trains, where the function returns a dict
        "timeout_s": 10.0,  # seconds for one sample
        "memory_mb": 2048,  # per worker, MiB
        "workers": 0,  # processes; 0 = auto
        "fallback": 0.0,  # score of a sample whose reward failed
        "url": "",  # of remote
        "group": False,  # the function gets all samples of a group at once, and returns a list
        "repetition_penalty": 0.0,  # taken from the reward of a response that ends in a loop
        "format_penalty": 0.0,  # taken from the reward of a response that is not <think>...</think><answer>...</answer>
        "post_process": "",  # dcpo (as the estimator dcpo has it), or package.module:function(samples, config)
        "overlong_buffer_len": 0,  # tokens before max_response_len over which the reward sinks; 0 = off
        "overlong_penalty": 1.0,  # by how much it has sunk at max_response_len
    },
    "algo": {
        # grpo, rloo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, dcpo, opd, sft (labels as
        # responses), or package.module:function
        "advantage_estimator": "grpo",
        "surrogate": "clip",  # clip, gspo, cispo, reinforce, sft, or package.module:function
        "loss_aggregation": "sample_mean",  # sample_mean, token_mean, constant, or package.module:function
        "loss_length": 0,  # tokens, the constant of constant; 0 = max_response_len
        "normalize_std": True,  # divide by the group's standard deviation
        "normalize_advantages": False,  # whiten the advantages over all trained tokens of the rollout
        "eps_clip": 0.2,  # the ratio is clipped at 1 - eps_clip
        "eps_clip_high": 0.2,  # and at 1 + eps_clip_high
        "dual_clip": 0.0,  # bound c > 1 of the loss where the advantage is negative; 0 = off
        "kl_coef": 0.0,  # weight of the KL to the reference in the reward
        "kl_reward_type": "k1",  # of that: k1, k2, k3, low_var_kl
        "kl_loss_coef": 0.0,  # weight of the KL to the reference in the loss; only one of the two is above 0
        "kl_loss_type": "low_var_kl",  # k1, k2, k3, low_var_kl
        "kl_unbiased": False,  # times the ratio to the old policy, which makes its gradient unbiased
        "kl_metric": False,  # compute the reference and log the KL also where kl_loss_coef is 0
        "entropy_coef": 0.0,  # weight of the entropy, which is maximised
        "gamma": 1.0,  # discount per token: ppo, reinforce_plus_plus
        "lambd": 1.0,  # GAE's lambda: ppo
        "critic": False,  # train a critic also for an estimator other than ppo
        "value_clip": 0.2,  # a value moves no further than this from its old one
        "num_critic_only_steps": 0,  # rollouts at first that train the critic alone
        "ref_update_interval": 0,  # rollouts after which the policy becomes the reference; 0 = never
        "old_logprobs": "trainer",  # trainer (scored before the first update) or rollout (the sampler's)
        "is_correction": "none",  # of the sampler's probabilities: none, truncate, mask
        "is_level": "token",  # ratio of each token, of the sequence, or its geometric mean
        "is_low": 0.0,  # bounds of that ratio
        "is_high": 2.0,
        "opsm_delta": 0.0,  # nats; samples of negative advantage that drifted further are left out; 0 = off
        "opd_kl_coef": 0.0,  # weight of log student - log teacher in the advantages
        "mask_truncated": False,  # responses cut at max_response_len are not trained, but count in their group
        "dcpo_calibration_weight": 0.5,  # of the squared error in the calibration reward
        "dcpo_calibration_scale": 1.0,  # of the calibration advantage
        "dcpo_hybrid_alpha": 0.5,  # share of the sample's own accuracy in the target; the rest is its group's
    },
    "optim": {
        "name": "adamw",  # adamw
        "lr": 1e-6,  # peak learning rate
        "critic_lr": 1e-5,  # of the critic
        "schedule": "constant",  # after the warm-up: constant, linear or cosine to 0
        "warmup_steps": 0,  # updates; the first one already has a rate above 0
        "weight_decay": 0.1,  # not on norms and biases
        "b1": 0.9,  # decay of the first moment
        "b2": 0.98,  # decay of the second moment
        "eps": 1e-8,  # added to the root of the second moment
        "clip_grad": 1.0,  # bound of the global gradient norm; 0 = off
        "max_nonfinite": 5,  # updates skipped in a row before the run stops
    },
    "train": {
        "global_batch_size": 0,  # samples per update; 0 = batch_size * n_samples_per_prompt, on-policy
        "max_tokens_per_device": 4096,  # tokens of one micro-batch on one device
        "length_buckets": (),  # row lengths, tokens; () = powers of two up to max_tokens_per_device
        "seed": 1234,  # of the sampler's draws and of new weights
    },
    "mesh": {
        "data": 1,  # replicas of the weights
        "fsdp": -1,  # shards of weights and optimizer; -1 = the remaining devices
        "tensor": 1,  # shards of heads, MLP and vocabulary
    },
    "eval": {
        "interval": 0,  # rollouts between evaluations; 0 = off
        "data": (),  # name=path, one for each set
        "n_samples": 1,  # responses per prompt
        "temperature": -1.0,  # 0 = greedy; -1 = the rollout's
        "top_p": -1.0,  # -1 = the rollout's
        "top_k": -1,  # 0 = off; -1 = the rollout's
        "max_response_len": -1,  # tokens; -1 = the rollout's
        "before_train": True,  # also before the first rollout
        # JSON object: by set, its own n_samples, temperature, top_p, top_k, max_response_len, the data keys input_key,
        # label_key, metadata_key, prompt_suffix, and reward (a value of reward.type)
        "overrides": "{}",
    },
    "checkpoint": {
        "dir": "",  # "" = checkpoints in the run's directory
        "save_interval": 50,  # rollouts; 0 = only at the end
        "keep": 3,  # newest checkpoints kept
        "async_save": True,  # write while the run goes on
        "load": "auto",  # auto (the newest of dir, if any), none, or a path
        "save_hf_interval": 0,  # rollouts between exports as Hugging Face folders, and at the end; 0 = off
        "save_hf_dtype": "bfloat16",  # of those: float32, bfloat16, float16
    },
    "debug": {
        "rollout_only": False,  # draw and score, train nothing
        "train_only": False,  # train on load_rollouts, evaluate nothing
        "save_rollouts": "",  # folder for every sample of every rollout, as JSONL
        "load_rollouts": "",  # such a folder: train on it instead of drawing
    },
    "log": {
        "dir": "runs/{config}-{time}",  # the run's directory
        "tensorboard": True,  # event files in the run's directory, or in TENSORBOARD_DIR
        "project": "rljax",  # of wandb, and the folder below TENSORBOARD_DIR
        "experiment": "",  # name of the run there; "" = the name of its directory
        "wandb": False,  # needs the package wandb
        "jsonl": True,  # metrics.jsonl
        "samples": 4,  # responses per rollout in samples.jsonl
        "interval": 1,  # rollouts between two console lines
    },
}
INT_TUPLES = frozenset(
    {"rollout.stop_token_ids", "sampler.prompt_buckets", "sampler.length_buckets", "train.length_buckets"}
)
# May differ when a run is resumed: where it writes and runs, what it evaluates, how long and how fast it learns.
FREE_SECTIONS = frozenset({"log", "eval", "checkpoint", "mesh", "debug"})
FREE_KNOBS = frozenset({"rollout.num_rollouts", "rollout.num_epochs", "optim.lr", "optim.critic_lr"})

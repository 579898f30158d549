"""A folder with the functions of a Megatron-LM checkout that the adapter relies on, and nothing else."""

from pathlib import Path

TRAINER = """
def pretrain(train_valid_test_dataset_provider, forward_step_func):
    initialize_megatron()
    setup_model_and_optimizer()
    build_train_valid_test_data_iterators()
    if True:
        train()

def setup_model_and_optimizer(checkpointing_context=None):
    load_checkpoint()

def get_train_valid_test_num_samples(): pass

def build_train_valid_test_datasets(provider): pass

def build_train_valid_test_data_loaders(provider): pass

def build_train_valid_test_data_iterators(provider):
    return build_train_valid_test_data_loaders(RerunDataIterator(provider))

def train(train_data_iterator, config):
    iteration = args.iteration
    num_floating_point_operations_so_far = args.num_floating_point_operations_so_far
    config.finalize_model_grads_func = finalize_model_grads
    train_step(), training_log(), checkpoint_and_decide_exit()

def train_step(optimizer, data_iterator, forward_backward_func):
    forward_backward_func(), optimizer.step()

def preprocess_common_state_dict(state): pass

def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
                 grad_norm, params_norm, num_zeros_in_grad, is_first_iteration): pass

def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far):
    save_checkpoint_and_time()

def evaluate_and_print_results(): pass

def evaluate(model): pass

from megatron.core.pipeline_parallel import get_forward_backward_func
from .datasets.data_samplers import build_pretraining_data_loader
from .checkpointing import save_checkpoint
from .async_utils import maybe_finalize_async_save
"""
CHECKPOINTING = """
def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                    checkpointing_context=None, preprocess_common_state_dict_fn=None): pass

def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, checkpointing_context=None):
    check_checkpoint_args(1)

def check_checkpoint_args(checkpoint_args): pass

def checkpoint_exists(path): pass
"""
FILES = {
    "pretrain_gpt.py": "",
    "megatron/training/training.py": TRAINER,
    "megatron/training/checkpointing.py": CHECKPOINTING,
    "megatron/training/initialize.py": "def initialize_megatron(allow_no_cuda=False): pass\n"
    "def _initialize_distributed(): torch.distributed.is_initialized()\ndef _compile_dependencies(): pass\n",
    "megatron/training/global_vars.py": "def _set_tensorboard_writer(args): pass\ndef _set_wandb_writer(args): pass\n"
    "def _set_one_logger(args): pass\n",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 2\n",
}


def plant(root: Path) -> Path:
    """Write the files below ``root``, and return it."""
    for name, text in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root

"""Hugging Face's Trainer as people use it under torchrun, with a model of a few hundred parameters and no download."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    words = torch.randint(0, 16, (64, 8))  # (N, T)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=TensorDataset(words, (words[:, 0] > 7).long()),
        data_collator=collate,
    )
    trainer.train()
    print(f"rank {arguments.process_index} of {arguments.world_size}: step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()

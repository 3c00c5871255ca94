"""Distillation in which the teacher is in eval mode, but neither frozen nor under no_grad. Each backward pass
computes gradients for the teacher that no optimizer uses: they take memory (once), and their sum only grows in
value. Nothing leaks per step; the fault is the gradients that nobody owns."""

import os

import torch
from torch import nn
from torch.nn import functional as F


def mlp(width):
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 20)
    )


def distillation_loss(student_logits, teacher_logits, temperature=2.0):
    student = F.log_softmax(student_logits / temperature, 1)
    teacher = F.softmax(teacher_logits / temperature, 1)
    return (teacher * (teacher.clamp_min(1e-9).log() - student)).sum(1).mean() * temperature**2


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    teacher, student = mlp(768).eval(), mlp(96)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    for step in range(220):
        x = torch.randn(192, 256)
        loss = distillation_loss(student(x), teacher(x))  # leak
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())


if __name__ == "__main__":
    main()

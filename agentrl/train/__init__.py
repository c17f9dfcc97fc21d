"""The decoupled-PPO trainer."""

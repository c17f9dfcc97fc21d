"""Shows people what a run does and did: the live view, the summary, the learning curve, transcripts."""

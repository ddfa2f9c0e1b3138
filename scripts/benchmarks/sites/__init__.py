"""What training at several sites costs in loss, and what it saves in bytes."""

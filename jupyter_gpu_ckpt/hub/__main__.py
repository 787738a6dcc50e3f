"""``python -m jupyter_gpu_ckpt.hub``: the page of all users' saved states."""

from .service import main

if __name__ == "__main__":
    main()

"""Compare the five scenarios: ``python -m examples.scenarios``."""

from examples.scenarios.comparison import main

if __name__ == "__main__":
    main()

"""Prime numbers."""


def is_prime(number: int) -> bool:
    """Whether a number has no divisors but one and itself."""
    return all(number % divisor for divisor in range(2, int(number**0.5)))

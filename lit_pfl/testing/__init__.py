"""Tests for what others build on this library; they need no test runner."""

from lit_pfl.testing.learners import check_learner
from lit_pfl.testing.method_tester import MethodTester, assert_equal
from lit_pfl.testing.methods import METHOD_CHECKS, check_method

__all__ = ["METHOD_CHECKS", "MethodTester", "assert_equal", "check_learner", "check_method"]

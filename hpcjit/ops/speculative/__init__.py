"""Speculative decoding: draft trees and their verification."""

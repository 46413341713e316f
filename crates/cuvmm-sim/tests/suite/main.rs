//! What must hold of a simulated driver, by subject. Rules are asked of both presets where their answers agree.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
mod reserve;

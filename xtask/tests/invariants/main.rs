//! The rules that the workspace holds itself to, read from its files.
#![forbid(unsafe_code)]
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "the helpers of a test may stop at what they did not expect, as the test may"
)]

mod dependencies;
mod options;
mod refused;
mod sources;
mod workspace;

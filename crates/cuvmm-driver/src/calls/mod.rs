//! The typed calls, by subject. Each makes exactly the one driver call that its first line names.
//!
//! They keep the driver's names, `get` included, in the spelling of Rust: whoever knows the manual finds the call, and
//! whoever reads a call finds the manual.

mod context;
mod event;
mod graph;
mod memory;
mod module;
mod stream;
mod virtual_memory;

pub use memory::MemoryInfo;
pub use stream::CaptureInfo;

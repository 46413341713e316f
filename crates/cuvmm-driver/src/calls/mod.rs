//! The typed calls, by subject. Each makes exactly the one driver call that its first line names.

mod context;
mod event;
mod graph;
mod memory;
mod module;
mod stream;
mod virtual_memory;

pub use memory::MemoryInfo;
pub use stream::CaptureInfo;

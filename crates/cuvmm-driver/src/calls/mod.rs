//! The typed calls, by subject. Each makes exactly the one driver call that its first line names.

mod virtual_memory;

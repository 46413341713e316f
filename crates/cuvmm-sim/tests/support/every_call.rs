//! Every call of the list with nothing for its arguments: null pointers, null handles and zeros.

#![allow(clippy::multiple_unsafe_ops_per_block, clippy::wildcard_imports, reason = "tests: the macro's one expression")]

use std::ffi::{c_char, c_void};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, RawDriver, for_each_call};

/// A call with nothing for its arguments; its code.
pub(crate) type Empty = fn(&dyn RawDriver) -> u32;

macro_rules! table {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// Every call of the list.
        pub(crate) const EMPTY: &[(Call, Empty)] = &[
            $((Call::$name, |raw| {
                // SAFETY: zeros are a value of each type, and a null pointer is one that no call reads or writes
                // through.
                unsafe { raw.$name($(std::mem::zeroed::<$ty>()),*) }.0
            })),*
        ];
    };
}

for_each_call!(table);

//! The library's symbols: the exported name of each call of the list, but for cuGetProcAddress, which `resolve` has.
//!
//! # Safety
//! Each function passes on what C passes it; the names are libcuda's own, and the signatures those of the list.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Served, for_each_call};

use crate::library::Library;

macro_rules! export {
    (
        optional cuGetProcAddress $resolve:literal $since:literal $arguments:tt;
        $($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*
    ) => {$(
        #[unsafe(export_name = $export)]
        #[allow(non_snake_case, reason = "the driver's own name")]
        #[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
            // SAFETY: the C caller keeps the call's conditions.
            unsafe { Library::served().$name($($arg),*) }
        }
    )*};
}

for_each_call!(export);

//! cuGetProcAddress, in both of its signatures, over everything that the library has: what the simulator finds, the
//! per-thread forms, and the driver's names beyond the list.
//!
//! # Safety
//! Both functions trust their pointers as C passes them: null, or valid for what the call reads and writes.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use cuvmm_driver::sys::{CUdriverProcAddressQueryResult, CudaVersion};
use cuvmm_driver::{CUresult, Call};

use crate::library::driver;
use crate::{beyond, per_thread};

/// The flag that asks for default streams that are the thread's own.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;
/// What an exported name may have behind the name that is asked for.
const SUFFIXES: [&str; 2] = ["_v", "_pt"];

/// cuGetProcAddress of CUDA 12.0 and later.
#[unsafe(export_name = "cuGetProcAddress_v2")]
unsafe extern "C" fn current(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut CUdriverProcAddressQueryResult,
) -> CUresult {
    if symbol.is_null() || pfn.is_null() {
        return CUresult::INVALID_VALUE;
    }
    // SAFETY: it is not null, so a C string.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    match resolve(symbol, CudaVersion(version), flags) {
        Err(code) => code,
        Ok((address, found)) => {
            // SAFETY: it is not null, so valid for a pointer.
            unsafe { pfn.write(address.cast_mut()) };
            if !status.is_null() {
                // SAFETY: it is not null, so valid for a status.
                unsafe { status.write(found) };
            }
            CUresult::SUCCESS
        }
    }
}

/// cuGetProcAddress of CUDA 11.3 to 11.8.
#[unsafe(export_name = "cuGetProcAddress")]
unsafe extern "C" fn older(symbol: *const c_char, pfn: *mut *mut c_void, version: i32, flags: u64) -> CUresult {
    // SAFETY: the caller keeps the conditions, and a status may be null.
    unsafe { current(symbol, pfn, version, flags, std::ptr::null_mut()) }
}

/// An address or null, and why there is none.
type Found = (*const c_void, CUdriverProcAddressQueryResult);

fn resolve(name: &CStr, version: CudaVersion, flags: u64) -> Result<Found, CUresult> {
    let found = |address: *const c_void| (address, CUdriverProcAddressQueryResult::SUCCESS);
    let (address, status) = driver().resolve(name, version, flags)?;
    if name == Call::cuGetProcAddress.symbol().name {
        return Ok(match version.0 {
            12000.. => found(current as ResolveFn as *const c_void),
            11030.. => found(older as ResolveOlderFn as *const c_void),
            _ => (std::ptr::null(), CUdriverProcAddressQueryResult::VERSION_NOT_SUFFICIENT),
        });
    }
    if status != CUdriverProcAddressQueryResult::SYMBOL_NOT_FOUND {
        return Ok((address, status));
    }
    if flags == PER_THREAD_DEFAULT_STREAM {
        // What is found without the flag, and not with it, has a form of its own for it.
        let (plain, _) = driver().resolve(name, version, 0)?;
        let call = Call::ALL.iter().find(|call| call.symbol().name == name);
        if let (false, Some(form)) = (plain.is_null(), call.and_then(|&call| per_thread::form(call))) {
            return Ok(found(form));
        }
    }
    Ok(if is_the_drivers(name) {
        found(beyond::unsupported as extern "C" fn() -> CUresult as *const c_void)
    } else {
        (address, status)
    })
}

type ResolveFn =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut CUdriverProcAddressQueryResult) -> CUresult;
type ResolveOlderFn = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CUresult;

/// Whether real drivers have a call of that name, without what tells its signatures apart.
fn is_the_drivers(name: &CStr) -> bool {
    let Ok(name) = name.to_str() else { return false };
    let is_it = |export: &str| {
        let rest = export.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || SUFFIXES.iter().any(|suffix| rest.starts_with(suffix)))
    };
    !SUFFIXES.iter().any(|suffix| name.contains(suffix))
        && (Call::ALL.iter().any(|call| call.name() == name) || beyond::EXPORTS.iter().any(|export| is_it(export)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_names_are_known_by_themselves() {
        let check = |name: &CStr, expect: bool| assert_eq!(is_the_drivers(name), expect, "{name:?}");
        check(c"cuMemMap", true);
        check(c"cuMemAllocAsync", true);
        check(c"cuArray3DCreate", true);
        check(c"cuMemcpy3DPeer", true);
        check(c"cuArray3DCreate_v2", false);
        check(c"cuMemAllocAsync_ptsz", false);
        check(c"cuArray3D", false);
        check(c"cumemmap", false);
        check(c"cuGetExportTable", false);
        check(c"", false);
    }
}

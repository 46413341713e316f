//! The driver, devices and contexts.

use std::ffi::{CString, c_char, c_void};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use super::{Args, Entry, Reply};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("init", init),
    Entry::call("version", version),
    Entry::call("resolve", resolve),
    Entry::call("error_name", error_name),
    Entry::call("error_text", error_text),
    Entry::call("device_count", device_count),
    Entry::call("device", device),
    Entry::call("device_attribute", device_attribute),
    Entry::call("device_name", device_name),
    Entry::call("uuid", uuid),
    Entry::call("total_memory", total_memory),
    Entry::call("pci", pci),
    Entry::call("can_access_peer", can_access_peer),
    Entry::call("p2p", p2p),
    Entry::call("context", context),
    Entry::call("retain_primary", retain_primary),
    Entry::call("release_primary", release_primary),
    Entry::call("reset_primary", reset_primary),
    Entry::call("primary_state", primary_state),
    Entry::call("current", current),
    Entry::call("set_current", set_current),
    Entry::call("push", push),
    Entry::call("pop", pop),
    Entry::call("current_device", current_device),
    Entry::call("sync_context", sync_context),
    Entry::call("destroy_context", destroy_context),
    Entry::call("enable_peer", enable_peer),
];

fn init(args: &mut Args<'_>) -> Result<Reply, String> {
    let flags = args.option("flags", 0)? as u32;
    Ok(Reply::code(call!(args, cuInit(flags))))
}

fn version(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut version = 0;
    let output = args.output(&mut version)?;
    let code = call!(args, cuDriverGetVersion(output));
    Ok(Reply::code(code).number(version as u64))
}

fn resolve(args: &mut Args<'_>) -> Result<Reply, String> {
    /// No address of a function.
    const UNTOUCHED: usize = 1;
    let name = CString::new(args.word()?).map_err(|error| error.to_string())?;
    let version = args.int()?;
    let flags = args.option("flags", 0)?;
    let mut address: *mut c_void = std::ptr::without_provenance_mut(UNTOUCHED);
    let mut status = CUdriverProcAddressQueryResult(u32::MAX);
    let to_address = args.output(&mut address)?;
    let to_status = args.output_named("status", &mut status)?;
    let code = call!(args, cuGetProcAddress(name.as_ptr(), to_address, version, flags, to_status));
    let found = match address.addr() {
        0 => "null",
        UNTOUCHED => "untouched",
        _ => "found",
    };
    let status = if status.0 == u32::MAX { "untouched".to_owned() } else { status.0.to_string() };
    Ok(Reply::code(code).always_tell(format!("{found} {status}")))
}

fn error_name(args: &mut Args<'_>) -> Result<Reply, String> {
    let error = CUresult(args.value()? as u32);
    let mut name: *const c_char = std::ptr::null();
    let output = args.output(&mut name)?;
    let code = call!(args, cuGetErrorName(error, output));
    let told = if name.is_null() { String::new() } else { string(name) };
    Ok(Reply::code(code).tell(told))
}

fn error_text(args: &mut Args<'_>) -> Result<Reply, String> {
    let error = CUresult(args.value()? as u32);
    let mut text: *const c_char = std::ptr::null();
    let output = args.output(&mut text)?;
    let code = call!(args, cuGetErrorString(error, output));
    Ok(Reply::code(code).tell(if text.is_null() { "none" } else { "some" }))
}

/// A string of the driver's own.
fn string(text: *const c_char) -> String {
    // SAFETY: the driver gave it, and such strings stay and end in NUL.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn device_count(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut count = 0;
    let output = args.output(&mut count)?;
    let code = call!(args, cuDeviceGetCount(output));
    Ok(Reply::code(code).number(count as u64))
}

fn device(args: &mut Args<'_>) -> Result<Reply, String> {
    let ordinal = args.int()?;
    let mut device = CUdevice::default();
    let output = args.output(&mut device)?;
    let code = call!(args, cuDeviceGet(output, ordinal));
    Ok(Reply::code(code).output(device.0 as u64))
}

/// The device of `of=`, the first if it is left out.
fn of_device(args: &mut Args<'_>) -> Result<CUdevice, String> {
    Ok(CUdevice(args.option("of", 0)? as i32))
}

fn device_attribute(args: &mut Args<'_>) -> Result<Reply, String> {
    let attribute = CUdevice_attribute(args.value()? as u32);
    let device = of_device(args)?;
    let mut value = 0_i32;
    let output = args.output(&mut value)?;
    let code = call!(args, cuDeviceGetAttribute(output, attribute, device));
    Ok(Reply::code(code).tell(value).output(value as u64))
}

fn device_name(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = of_device(args)?;
    let mut name = [0 as c_char; 256];
    let output = args.output(&mut name)?;
    Ok(Reply::code(call!(args, cuDeviceGetName(output.cast(), 256, device))))
}

fn pci(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = of_device(args)?;
    let length = args.option("length", 64)?.min(64) as i32;
    let mut id = [0 as c_char; 64];
    let output = args.output(&mut id)?;
    Ok(Reply::code(call!(args, cuDeviceGetPCIBusId(output.cast(), length, device))))
}

fn uuid(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = of_device(args)?;
    let mut uuid = CUuuid::default();
    let output = args.output(&mut uuid)?;
    let code = call!(args, cuDeviceGetUuid(output, device));
    let half = u64::from_ne_bytes(uuid.bytes[8..].try_into().unwrap_or_default());
    Ok(Reply::code(code).output(half))
}

fn total_memory(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = of_device(args)?;
    let mut bytes = 0_usize;
    let output = args.output(&mut bytes)?;
    let code = call!(args, cuDeviceTotalMem(output, device));
    Ok(Reply::code(code).output(bytes as u64))
}

fn can_access_peer(args: &mut Args<'_>) -> Result<Reply, String> {
    let (device, peer) = (CUdevice(args.int()?), CUdevice(args.int()?));
    let mut can = 0;
    let output = args.output(&mut can)?;
    let code = call!(args, cuDeviceCanAccessPeer(output, device, peer));
    Ok(Reply::code(code).number(can as u64))
}

fn p2p(args: &mut Args<'_>) -> Result<Reply, String> {
    let attribute = CUdevice_P2PAttribute(args.value()? as u32);
    let (source, destination) = (CUdevice(args.int()?), CUdevice(args.int()?));
    let mut value = 0;
    let output = args.output(&mut value)?;
    let code = call!(args, cuDeviceGetP2PAttribute(output, attribute, source, destination));
    Ok(Reply::code(code).number(value as u64))
}

/// A context's value as a variable has it.
pub(super) fn bits(context: CUcontext) -> u64 {
    context.0.expose_provenance() as u64
}

fn context(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = of_device(args)?;
    let mut context = CUcontext::NULL;
    let code = call!(args, cuDevicePrimaryCtxRetain(&raw mut context, device));
    if !code.is_success() {
        return Ok(Reply::code(code).output(0));
    }
    Ok(Reply::code(call!(args, cuCtxSetCurrent(context))).output(bits(context)))
}

fn retain_primary(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = CUdevice(args.int()?);
    let mut context = CUcontext::NULL;
    let output = args.output(&mut context)?;
    let code = call!(args, cuDevicePrimaryCtxRetain(output, device));
    Ok(Reply::code(code).output(bits(context)))
}

fn release_primary(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = CUdevice(args.int()?);
    Ok(Reply::code(call!(args, cuDevicePrimaryCtxRelease(device))))
}

fn reset_primary(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = CUdevice(args.int()?);
    Ok(Reply::code(call!(args, cuDevicePrimaryCtxReset(device))))
}

fn primary_state(args: &mut Args<'_>) -> Result<Reply, String> {
    let device = CUdevice(args.int()?);
    let (mut flags, mut active) = (0, 0);
    let to_flags = args.output_named("flags", &mut flags)?;
    let to_active = args.output_named("active", &mut active)?;
    let code = call!(args, cuDevicePrimaryCtxGetState(device, to_flags, to_active));
    Ok(Reply::code(code).tell(format!("{flags} {active}")))
}

fn current(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut context = CUcontext::NULL;
    let output = args.output(&mut context)?;
    let code = call!(args, cuCtxGetCurrent(output));
    Ok(Reply::code(code).tell(if context.is_null() { "none" } else { "some" }).output(bits(context)))
}

fn set_current(args: &mut Args<'_>) -> Result<Reply, String> {
    let context = CUcontext(args.pointer()?);
    Ok(Reply::code(call!(args, cuCtxSetCurrent(context))))
}

fn push(args: &mut Args<'_>) -> Result<Reply, String> {
    let context = CUcontext(args.pointer()?);
    Ok(Reply::code(call!(args, cuCtxPushCurrent(context))))
}

fn pop(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut context = CUcontext::NULL;
    let output = args.output(&mut context)?;
    let code = call!(args, cuCtxPopCurrent(output));
    Ok(Reply::code(code).output(bits(context)))
}

fn current_device(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut device = CUdevice::default();
    let output = args.output(&mut device)?;
    let code = call!(args, cuCtxGetDevice(output));
    Ok(Reply::code(code).number(device.0 as u64))
}

fn sync_context(args: &mut Args<'_>) -> Result<Reply, String> {
    Ok(Reply::code(call!(args, cuCtxSynchronize())))
}

fn destroy_context(args: &mut Args<'_>) -> Result<Reply, String> {
    let context = CUcontext(args.pointer()?);
    Ok(Reply::code(call!(args, cuCtxDestroy(context))))
}

fn enable_peer(args: &mut Args<'_>) -> Result<Reply, String> {
    let context = CUcontext(args.pointer()?);
    let flags = args.option("flags", 0)? as u32;
    Ok(Reply::code(call!(args, cuCtxEnablePeerAccess(context, flags))))
}

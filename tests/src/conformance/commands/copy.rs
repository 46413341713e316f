//! Copies, sets, plain memory.

use std::ffi::c_void;

use cuvmm_driver::sys::*;

use super::{Args, Entry, Reply};
use crate::conformance::scene::HOST_BUFFER;

pub(super) const TABLE: &[Entry] = &[
    Entry::call("copy", copy),
    Entry::call("dtod", dtod),
    Entry::call("htod", htod),
    Entry::call("dtoh", dtoh),
    Entry::call("copy_peer", copy_peer),
    Entry::call("memset8", memset8),
    Entry::call("memset16", memset16),
    Entry::call("memset32", memset32),
    Entry::call("word", word),
    Entry::call("alloc", alloc),
    Entry::call("dealloc", dealloc),
    Entry::call("free_memory", free_memory),
    Entry::call("memory_info", memory_info),
];

fn copy(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, from, bytes) = (args.address()?, args.address()?, args.size()?);
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemcpyAsync(to, from, bytes, stream)),
        None => call!(args, cuMemcpy(to, from, bytes)),
    }))
}

fn dtod(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, from, bytes) = (args.address()?, args.address()?, args.size()?);
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemcpyDtoDAsync(to, from, bytes, stream)),
        None => call!(args, cuMemcpyDtoD(to, from, bytes)),
    }))
}

/// Where the host's side of a copy is: the host buffer, or null.
fn host_side(args: &mut Args<'_>, name: &str, bytes: usize) -> Result<*mut c_void, String> {
    let host = args.scene.evaluate("host")?.bits;
    let address = args.option(name, host)?;
    let end = address.checked_sub(host).and_then(|offset| (offset as usize).checked_add(bytes));
    let is_inside = end.is_some_and(|end| end <= HOST_BUFFER);
    if address != 0 && !is_inside {
        return Err("more than there is of the host buffer".to_owned());
    }
    Ok(std::ptr::with_exposed_provenance_mut(address as usize))
}

fn htod(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, bytes) = (args.address()?, args.size()?);
    let from = host_side(args, "from", bytes)?;
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemcpyHtoDAsync(to, from, bytes, stream)),
        None => call!(args, cuMemcpyHtoD(to, from, bytes)),
    }))
}

fn dtoh(args: &mut Args<'_>) -> Result<Reply, String> {
    let (from, bytes) = (args.address()?, args.size()?);
    let to = host_side(args, "to", bytes)?;
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemcpyDtoHAsync(to, from, bytes, stream)),
        None => call!(args, cuMemcpyDtoH(to, from, bytes)),
    }))
}

fn copy_peer(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, to_context) = (args.address()?, CUcontext(args.pointer()?));
    let (from, from_context) = (args.address()?, CUcontext(args.pointer()?));
    let bytes = args.size()?;
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, stream)),
        None => call!(args, cuMemcpyPeer(to, to_context, from, from_context, bytes)),
    }))
}

fn memset8(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, value, count) = (args.address()?, args.value()? as u8, args.size()?);
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemsetD8Async(to, value, count, stream)),
        None => call!(args, cuMemsetD8(to, value, count)),
    }))
}

fn memset16(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, value, count) = (args.address()?, args.value()? as u16, args.size()?);
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemsetD16Async(to, value, count, stream)),
        None => call!(args, cuMemsetD16(to, value, count)),
    }))
}

fn memset32(args: &mut Args<'_>) -> Result<Reply, String> {
    let (to, value, count) = (args.address()?, args.value()? as u32, args.size()?);
    Ok(Reply::code(match args.on_stream()? {
        Some(stream) => call!(args, cuMemsetD32Async(to, value, count, stream)),
        None => call!(args, cuMemsetD32(to, value, count)),
    }))
}

/// A word as it is told.
pub(super) fn word_name(word: u32) -> String {
    format!("{word:#010x}")
}

fn word(args: &mut Args<'_>) -> Result<Reply, String> {
    let from = args.address()?;
    let mut word = 0_u32;
    let to = args.output(&mut word)?;
    let code = call!(args, cuMemcpyDtoH(to.cast(), from, size_of::<u32>()));
    Ok(Reply::code(code).tell(word_name(word)).output(word.into()))
}

fn alloc(args: &mut Args<'_>) -> Result<Reply, String> {
    let size = args.size()?;
    let mut address = CUdeviceptr::default();
    let output = args.output(&mut address)?;
    let code = call!(args, cuMemAlloc(output, size));
    Ok(Reply::code(code).output(address.0))
}

fn dealloc(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.address()?;
    Ok(Reply::code(call!(args, cuMemFree(address))))
}

fn info(args: &mut Args<'_>) -> Result<Reply, String> {
    let (mut free, mut total) = (0, 0);
    let to_free = args.output_named("free", &mut free)?;
    let to_total = args.output_named("total", &mut total)?;
    let code = call!(args, cuMemGetInfo(to_free, to_total));
    Ok(Reply::code(code).output(free as u64))
}

fn free_memory(args: &mut Args<'_>) -> Result<Reply, String> {
    info(args)
}

fn memory_info(args: &mut Args<'_>) -> Result<Reply, String> {
    info(args)
}

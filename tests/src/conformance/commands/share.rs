//! Exports, imports and descriptors.

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd};

use cuvmm_driver::sys::*;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{Args, Entry, Reply};
use crate::conformance::part::{fabric, start};
use crate::conformance::run::Setting;
use crate::conformance::value::{Kind, Value, is_name};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("export", export),
    Entry::call("import", import),
    Entry::call("dma_buf", dma_buf),
    Entry::other("close", close),
    Entry::other("file", file),
    Entry::other("memfd", memfd),
    Entry::other("duplicate", duplicate),
    Entry::other("limit_files", limit_files),
    Entry::other("process", process),
    Entry::other("send", send),
    Entry::other("receive", receive),
    Entry::other("finish", finish),
    Entry::other("kill", kill),
];

/// What a shared handle is written to: large enough for each kind.
#[repr(C, align(8))]
struct Room([u8; 64]);

fn export(args: &mut Args<'_>) -> Result<Reply, String> {
    let handle = CUmemGenericAllocationHandle(args.value()?);
    let kind = CUmemAllocationHandleType(args.option("kind", 1)? as u32);
    let flags = args.option("flags", 0)?;
    let mut room = Room([0; 64]);
    let output = args.output(&mut room)?;
    let code = call!(args, cuMemExportToShareableHandle(output.cast::<c_void>(), handle, kind, flags));
    if !code.is_success() {
        return Ok(Reply::code(code).output(0));
    }
    let value = if kind == CUmemAllocationHandleType::FABRIC { fabric(room.0) } else { made(args, &room) };
    Ok(Reply::code(code).output_of(value))
}

/// A descriptor that a call made just now.
fn made(args: &Args<'_>, room: &Room) -> Value {
    let [a, b, c, d, ..] = room.0;
    // SAFETY: the call succeeded: the descriptor is open, and ours.
    let file = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes([a, b, c, d])) };
    kept(args, file)
}

pub(super) fn kept(args: &Args<'_>, file: OwnedFd) -> Value {
    Value { bits: args.scene.keep(file) as u64, kind: Kind::File }
}

fn import(args: &mut Args<'_>) -> Result<Reply, String> {
    let shared = args.pointer()?;
    let kind = CUmemAllocationHandleType(args.option("kind", 1)? as u32);
    let mut handle = CUmemGenericAllocationHandle::default();
    let output = args.output(&mut handle)?;
    let code = call!(args, cuMemImportFromShareableHandle(output, shared, kind));
    Ok(Reply::code(code).output(handle.0))
}

fn dma_buf(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, size) = (args.address()?, args.size()?);
    let kind = CUmemRangeHandleType(args.option("kind", 1)? as u32);
    let flags = args.option("flags", 0)?;
    let mut room = Room([0; 64]);
    let output = args.output(&mut room)?;
    let code = call!(args, cuMemGetHandleForAddressRange(output.cast::<c_void>(), address, size, kind, flags));
    let value = if code.is_success() { made(args, &room) } else { Value::number(0) };
    Ok(Reply::code(code).output_of(value))
}

fn close(args: &mut Args<'_>) -> Result<Reply, String> {
    let file = args.file()?;
    args.scene.files.lock().unwrap().remove(&file);
    Ok(Reply::done())
}

fn file(args: &mut Args<'_>) -> Result<Reply, String> {
    let number = args.file()?;
    let files = args.scene.files.lock().unwrap();
    let file = files.get(&number).ok_or("it was closed")?;
    let flags = fcntl(file, FcntlArg::F_GETFD).map_err(|error| error.to_string())?;
    let closes = FdFlag::from_bits_retain(flags).contains(FdFlag::FD_CLOEXEC);
    Ok(Reply::word(if closes { "cloexec yes" } else { "cloexec no" }))
}

fn memfd(args: &mut Args<'_>) -> Result<Reply, String> {
    let file = memfd_create(c"conformance", MFdFlags::MFD_CLOEXEC).map_err(|error| error.to_string())?;
    Ok(Reply::done().output_of(kept(args, file)))
}

fn duplicate(args: &mut Args<'_>) -> Result<Reply, String> {
    let number = args.file()?;
    let copy = args.scene.files.lock().unwrap().get(&number).ok_or("it was closed")?.try_clone();
    Ok(Reply::done().output_of(kept(args, copy.map_err(|error| error.to_string())?)))
}

fn limit_files(args: &mut Args<'_>) -> Result<Reply, String> {
    if !args.scene.is_other_process {
        return Err("it would limit everybody: %p limit_files N".to_owned());
    }
    let limit = args.value()?;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| error.to_string())?;
    setrlimit(Resource::RLIMIT_NOFILE, limit, most).map_err(|error| error.to_string())?;
    Ok(Reply::done())
}

fn process(args: &mut Args<'_>) -> Result<Reply, String> {
    let name = args.word()?;
    let visible = args.option_word("visible").map(|text| args.scene.evaluate(text)).transpose()?;
    let visible = visible.map(|value| value.bits as usize);
    let setting = Setting { visible, ..args.scene.setting.clone() };
    let process = start(&setting, "process").map_err(|error| error.to_string())?;
    args.scene.processes.lock().unwrap().insert(name.to_owned(), process.into());
    Ok(Reply::done())
}

/// The `as NAME` of `send` and `receive`.
fn new_name<'a>(args: &mut Args<'a>) -> Result<&'a str, String> {
    let (preposition, name) = (args.word()?, args.word()?);
    if preposition == "as" && is_name(name) { Ok(name) } else { Err("`as NAME`".to_owned()) }
}

fn send(args: &mut Args<'_>) -> Result<Reply, String> {
    let (process, value) = (args.word()?, args.any()?);
    let name = new_name(args)?;
    args.scene.process(process)?.give(name, value, &args.scene.files.lock().unwrap())?;
    Ok(Reply::done())
}

fn receive(args: &mut Args<'_>) -> Result<Reply, String> {
    let (process, theirs) = (args.word()?, args.word()?);
    let name = new_name(args)?;
    let value = args.scene.process(process)?.take(theirs, args.scene)?;
    args.scene.variables.lock().unwrap().insert(name.to_owned(), value);
    Ok(Reply::done())
}

fn finish(args: &mut Args<'_>) -> Result<Reply, String> {
    let name = args.word()?;
    args.scene.process(name)?.finish()?;
    Ok(Reply::done())
}

fn kill(args: &mut Args<'_>) -> Result<Reply, String> {
    let name = args.word()?;
    args.scene.process(name)?.kill();
    Ok(Reply::done())
}

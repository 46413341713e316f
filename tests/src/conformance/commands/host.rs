//! What makes no call: comparisons, waits, and the host's own hand on memory.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use super::copy::word_name;
use super::share::kept;
use super::{Args, Entry, Reply};
use crate::conformance::value::Kind;

pub(super) const TABLE: &[Entry] = &[
    Entry::other("open", open),
    Entry::other("equal", equal),
    Entry::other("less", less),
    Entry::other("aligned", aligned),
    Entry::other("host_pages", host_pages),
    Entry::other("sleep", sleep),
    Entry::other("host_read", host_read),
    Entry::other("host_write", host_write),
];

/// The most that a check may sleep at once.
const MOST: u64 = 5000;

/// Opens a gate, or a file by its path.
fn open(args: &mut Args<'_>) -> Result<Reply, String> {
    let word = args.word()?;
    if word.starts_with('/') {
        let file = std::fs::File::open(word).map_err(|error| format!("{word}: {error}"))?;
        return Ok(Reply::done().output_of(kept(args, file.into())));
    }
    let value = args.scene.evaluate(word)?;
    if value.kind != Kind::Gate {
        return Err(format!("neither a gate nor a path: {word}"));
    }
    args.scene.gates.lock().unwrap().get(value.bits as usize).ok_or("no such gate")?.open();
    Ok(Reply::done())
}

fn equal(args: &mut Args<'_>) -> Result<Reply, String> {
    Ok(Reply::yes_or_no(args.value()? == args.value()?))
}

fn less(args: &mut Args<'_>) -> Result<Reply, String> {
    Ok(Reply::yes_or_no(args.value()? < args.value()?))
}

fn aligned(args: &mut Args<'_>) -> Result<Reply, String> {
    Ok(Reply::yes_or_no(args.value()?.is_multiple_of(args.value()?)))
}

/// Addresses that the host uses, never given back, as aligned as a hint must be.
fn host_pages(args: &mut Args<'_>) -> Result<Reply, String> {
    const UNIT: usize = 2 << 20;
    let size = args.size()?;
    let buffer = vec![0_u8; size + UNIT].leak();
    Ok(Reply::done().output(buffer.as_ptr().addr().next_multiple_of(UNIT) as u64))
}

fn sleep(args: &mut Args<'_>) -> Result<Reply, String> {
    let milliseconds = args.value()?;
    if milliseconds > MOST {
        return Err(format!("a check sleeps for {MOST} ms at most"));
    }
    std::thread::sleep(Duration::from_millis(milliseconds));
    Ok(Reply::done())
}

/// What became of a transfer in a simulator's process, where the kernel answers for what would kill it.
fn survived(transferred: Result<usize, Errno>) -> Result<bool, String> {
    match transferred {
        Ok(bytes) => Ok(bytes == size_of::<u32>()),
        Err(Errno::EFAULT) => Ok(false),
        Err(error) => Err(format!("no transfer: {error}")),
    }
}

fn host_read(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.size()?;
    if !args.scene.is_simulated() {
        let pointer = std::ptr::with_exposed_provenance::<u32>(address);
        // SAFETY: what the host may touch is the question, in a process that may die of it.
        let word = unsafe { pointer.read_volatile() };
        return Ok(Reply::word(word_name(word)).output(word.into()));
    }
    let mut bytes = [0; size_of::<u32>()];
    let remote = [RemoteIoVec { base: address, len: size_of::<u32>() }];
    let read = process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut bytes)], &remote);
    let word = u32::from_ne_bytes(bytes);
    let told = if survived(read)? { word_name(word) } else { "crash".to_owned() };
    Ok(Reply::word(told).output(word.into()))
}

fn host_write(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, value) = (args.size()?, args.value()? as u32);
    if !args.scene.is_simulated() {
        let pointer = std::ptr::with_exposed_provenance_mut::<u32>(address);
        // SAFETY: as for reading; the memory is the driver's, which no Rust value is in.
        unsafe { pointer.write_volatile(value) };
        return Ok(Reply::done());
    }
    let remote = [RemoteIoVec { base: address, len: size_of::<u32>() }];
    let written = process_vm_writev(Pid::this(), &[IoSlice::new(&value.to_ne_bytes())], &remote);
    Ok(if survived(written)? { Reply::done() } else { Reply::word("crash") })
}

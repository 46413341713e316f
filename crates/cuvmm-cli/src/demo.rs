//! The main job: a buffer is allocated, grown in place, grown by moving, and shared with a second process.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cuvmm::handles::Reservation;
use cuvmm::{Error, HandleKind, Options, Outcome, VirtualMemoryBuffer, VirtualMemoryResource, ipc};

use crate::flags::Choice;
use crate::machine::Chosen;
use crate::pattern::{self, FIRST, SECOND};
use crate::report::{Table, line};

const MIB: usize = 1 << 20;
/// How long the two processes wait for each other.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(choice: Choice) -> Result<()> {
    let chosen = Chosen::new(choice)?;
    line(&format!("running on {}", chosen.words))?;
    let steps = Table::begin()?;
    job(&chosen, steps)?;
    match chosen.left_behind() {
        None => line("nothing is left behind"),
        Some(left) => bail!("left behind: {left}"),
    }
}

fn job(chosen: &Chosen, mut table: Table) -> Result<()> {
    let options = Options::new().handle_kind(HandleKind::PosixFd);
    let resource = VirtualMemoryResource::new(&chosen.device, options).map_err(Error::from)?;

    table.start();
    let first = resource.allocate_with_capacity(64 * MIB, 128 * MIB).map_err(Error::from)?;
    table.buffer("allocate, room for 128 MiB", &first)?;
    pattern::write(&first, FIRST, 0)?;

    table.start();
    let second = first.grow(128 * MIB).map_err(Error::from)?;
    table.buffer("grow", &second)?;
    ensure!(second.outcome() == Some(Outcome::InPlace), "the first grow moved although it had room");
    ensure!(second.address() == first.address(), "the address changed although the grow was in place");
    pattern::write(&second, FIRST, first.size())?;

    let occupied = occupy_behind(&second)?;
    table.start();
    let third = second.grow(192 * MIB).map_err(Error::from)?;
    table.buffer("grow, with the addresses taken", &third)?;
    ensure!(third.outcome() == Some(Outcome::Moved), "the second grow did not move although its addresses were taken");
    pattern::write(&third, FIRST, second.size())?;
    drop(occupied);

    table.start();
    let verified = pattern::verify(&third, FIRST)?;
    table.verified("read back here", verified)?;

    share(chosen, &mut table, &third)?;

    table.start();
    let verified = pattern::verify(&third, SECOND)?;
    table.verified("what the other process wrote", verified)?;

    table.start();
    for buffer in [first, second, third] {
        buffer.close().map_err(Error::from)?;
    }
    table.plain("close all")
}

/// Sees to it that the addresses behind the buffer are somebody's. Where they are already, that does as well.
fn occupy_behind(buffer: &VirtualMemoryBuffer) -> Result<Option<Reservation>> {
    let Some(behind) = buffer.address().checked_add(buffer.capacity()) else { return Ok(None) };
    let size = Reservation::GRANULARITY.exact(64 * MIB).map_err(Error::from)?;
    Ok(Reservation::at(buffer.resource().device().driver(), size, behind).ok())
}

/// Has a second process import the buffer, verify it and write to it.
fn share(chosen: &Chosen, table: &mut Table, buffer: &VirtualMemoryBuffer) -> Result<()> {
    let descriptor = ipc::export(buffer).map_err(Error::from).context("failed to export the buffer")?;
    let (ours, theirs) = UnixStream::pair().context("failed to make a socket pair")?;
    let program = std::env::current_exe().context("failed to find this program's own file")?;
    let mut peer = Command::new(program)
        .args(["demo-peer", "--driver", &chosen.choice.to_string()])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::piped())
        .spawn()
        .context("failed to start the second process")?;

    table.start();
    let sent = ipc::send(&ours, &descriptor, Instant::now() + PATIENCE)
        .map_err(Error::from)
        .context("failed to send the buffer");
    // A peer that still waits learns at once that nothing comes.
    drop(ours);
    let words = match (finish(&mut peer), sent) {
        (Ok(words), Ok(())) => words,
        (Err(peer), Ok(())) => return Err(peer),
        (Ok(_), Err(error)) => return Err(error),
        (Err(peer), Err(error)) => return Err(error.context(format!("{peer:#}"))),
    };
    table.plain("send, await the other process")?;
    line(words.trim_end())
}

/// Waits for the second process, and gives what it said.
fn finish(peer: &mut Child) -> Result<String> {
    let mut words = String::new();
    let heard = peer.stdout.as_mut().map_or(Ok(0), |stdout| stdout.read_to_string(&mut words));
    let status = peer.wait().context("failed to await the second process")?;
    heard.context("failed to hear the second process")?;
    ensure!(status.success(), "the second process failed: {status}");
    Ok(words)
}

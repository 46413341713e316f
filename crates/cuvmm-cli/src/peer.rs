//! The second process of the demo: imports what it is sent, verifies it and writes to it.

use std::io::stdin;
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use cuvmm::{Error, HandleKind, Limits, Options, VirtualMemoryResource, ipc};

use crate::demo::PATIENCE;
use crate::flags::Choice;
use crate::machine::Chosen;
use crate::pattern::{self, FIRST, SECOND};
use crate::report::Table;

pub(crate) fn run(choice: Choice) -> Result<()> {
    let socket = stdin().as_fd().try_clone_to_owned().context("failed to take the socket at standard input")?;
    let chosen = Chosen::new(choice)?;
    let options = Options::new().handle_kind(HandleKind::PosixFd);
    let resource = VirtualMemoryResource::new(&chosen.device, options).map_err(Error::from)?;

    let deadline = Instant::now() + PATIENCE;
    let descriptor = ipc::receive(&socket, &Limits::default(), deadline)
        .map_err(Error::from)
        .context("failed to receive a buffer (the demo starts this process with a socket as standard input)")?;
    let mut table = Table::resume();
    let buffer = ipc::import(&resource, descriptor).map_err(Error::from).context("failed to import the buffer")?;
    table.buffer("  other process: import", &buffer)?;

    table.start();
    let verified = pattern::verify(&buffer, FIRST).context("the buffer does not hold what was sent")?;
    table.verified("  other process: read", verified)?;

    table.start();
    pattern::write(&buffer, SECOND, 0)?;
    table.plain("  other process: write")?;
    buffer.close().map_err(Error::from)?;
    drop(resource);
    match chosen.left_behind() {
        None => Ok(()),
        Some(left) => bail!("the second process left behind: {left}"),
    }
}

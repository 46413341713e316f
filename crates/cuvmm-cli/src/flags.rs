//! The command's flags.

use std::str::FromStr;

use cuvmm_sim::Machine;

/// Which driver to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The GPU where there is one; else the simulator.
    #[default]
    Auto,
    /// The GPU.
    Cuda,
    /// The simulator.
    Sim,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda),
            "sim" => Ok(Self::Sim),
            _ => Err(format!("no driver `{name}`: auto, cuda or sim")),
        }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            Self::Sim => "sim",
        })
    }
}

/// A simulated machine that can be examined: the default is the first that the simulator names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Simulated {
    name: &'static str,
    pub(crate) model: fn() -> Machine,
}

impl From<(&'static str, fn() -> Machine)> for Simulated {
    fn from((name, model): (&'static str, fn() -> Machine)) -> Self {
        Self { name, model }
    }
}

impl Default for Simulated {
    fn default() -> Self {
        Machine::NAMED[0].into()
    }
}

impl FromStr for Simulated {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Machine::NAMED.into_iter().find(|(known, _)| *known == name);
        let known = || Machine::NAMED.map(|(name, _)| name).join(", ");
        found.map(Self::from).ok_or_else(|| format!("no simulated machine `{name}`: {}", known()))
    }
}

impl std::fmt::Display for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

xflags::xflags! {
    /// Elastic GPU memory: buffers that grow in place, and are shared between processes.
    cmd cuvmm {
        /// Allocates a buffer, grows it in place and by moving, and shares it with a second process.
        cmd demo {
            /// auto (the GPU where there is one, else the simulator), cuda, or sim.
            optional --driver choice: Choice
        }
        /// Tries out step by step what works on this machine, and says what usually cures what does not.
        cmd doctor {
            /// auto and cuda (this machine, with a GPU or without), or sim.
            optional --driver choice: Choice
            /// Which simulated machine `--driver sim` examines: h200, h200_pair, small or odd.
            optional --machine machine: Simulated
            /// One JSON document in place of text.
            optional --json
        }
        /// The second process of `demo`, which starts it with a socket as its standard input.
        cmd demo-peer {
            /// cuda or sim.
            required --driver choice: Choice
        }
    }
}

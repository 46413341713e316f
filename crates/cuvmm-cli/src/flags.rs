//! The command's flags.

use std::str::FromStr;

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

xflags::xflags! {
    /// Elastic GPU memory: buffers that grow in place, and are shared between processes.
    cmd cuvmm {
        /// Allocates a buffer, grows it in place and by moving, and shares it with a second process.
        cmd demo {
            /// auto (the GPU where there is one, else the simulator), cuda, or sim.
            optional --driver choice: Choice
        }
        /// The second process of `demo`, which starts it with a socket as its standard input.
        cmd demo-peer {
            /// cuda or sim.
            required --driver choice: Choice
        }
    }
}

//! The masks that a reader can choose on the page.

use attn_core::{Align, Attention, Mask};

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PageMask {
    /// Those up to itself.
    Causal,
    /// All.
    All,
}

impl PageMask {
    pub(super) fn name(self) -> String {
        match self {
            Self::Causal => "causal",
            Self::All => "none",
        }
        .to_owned()
    }

    /// Attention with this mask alone.
    pub(super) fn attention(self) -> Attention<'static> {
        match self {
            Self::Causal => Attention::new().mask(Mask::causal(Align::TopLeft)),
            Self::All => Attention::new(),
        }
    }
}

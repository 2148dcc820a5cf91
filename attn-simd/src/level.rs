//! Which instruction set to run (interface; detection follows).

/// An instruction-set level that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the build was made for, through `wide`.
    Portable,
}

/// Why a level cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LevelError {
    /// No level has this name.
    Unknown,
    /// This machine lacks the level's instructions.
    Missing,
}

impl Level {
    /// The best level of this machine, or the one that the environment variable `ATTN_LEVEL` names.
    pub fn detect() -> Self {
        Self::Portable
    }

    /// Every level of this machine, weakest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Portable].into_iter()
    }

    /// A level by its name: `portable`, `avx2`, `avx512`.
    ///
    /// # Errors
    /// [`LevelError`].
    pub fn by_name(name: &str) -> Result<Self, LevelError> {
        if name == "portable" { Ok(Self::Portable) } else { Err(LevelError::Unknown) }
    }

    /// The name: `portable`, `avx2`, `avx512`.
    pub const fn name(self) -> &'static str {
        "portable"
    }
}

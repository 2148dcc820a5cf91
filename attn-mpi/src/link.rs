//! The links between ranks: latency and bandwidth, stated or measured by a ping.

use std::fmt;
use std::time::Instant;

use crate::wire::Wire;

/// A link between two ranks, and the speed of a rank: the same on every rank, the worst of all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds of an empty message.
    pub alpha: f64,
    /// Seconds of a byte.
    pub beta: f64,
    /// Operations in a second of one rank: a guess of 5·10¹⁰ unless given, which [`Explain`] names beside its times.
    pub flops: f64,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { alpha, beta, flops } = self;
        writeln!(f, "links: {:.1} µs a message, {:.2} GB/s", alpha * 1e6, 1e-9 / beta)?;
        writeln!(f, "ranks: {:.0} GFLOP/s assumed, masks not counted", flops * 1e-9)
    }
}

/// Bytes of the long message of the ping.
const LONG: usize = 1 << 20;

impl Link {
    /// A link of so many gigabits a second, with a latency in microseconds.
    pub fn gigabits(gigabits: f64, micros: f64) -> Self {
        Self { alpha: micros * 1e-6, beta: 8e-9 / gigabits, flops: 5e10 }
    }

    /// With the speed of a rank, in operations a second.
    #[must_use]
    pub fn flops(mut self, flops: f64) -> Self {
        self.flops = flops;
        self
    }

    /// Sends some messages to the right neighbour while the left one's arrive, and takes the worst of all ranks.
    pub(crate) fn measure(wire: &mut Wire) -> Self {
        let (me, ranks) = (wire.rank(), wire.ranks());
        let fallback = Self { alpha: 1e-6, beta: 1e-10, flops: 5e10 };
        if ranks == 1 {
            return fallback;
        }
        let (to, from) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let time = |len: usize| {
            let (mine, mut theirs) = (vec![0u8; len], vec![0u8; len]);
            let times = (0..4).map(|_| {
                let start = Instant::now();
                wire.exchange("the ping", 3, &[(to, &mine)], vec![(from, &mut theirs)], |_| ());
                start.elapsed().as_secs_f64()
            });
            times.fold(f64::INFINITY, f64::min)
        };
        let (short, long) = (time(1), time(LONG));
        let mine = [short, ((long - short) / LONG as f64).max(1e-12)];
        let bytes: Vec<u8> = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = wire.all_gather("the ping", 3, &bytes).0;
        let all: Vec<f64> = all.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect();
        let worst = |first: usize| all.iter().skip(first).step_by(2).copied().fold(0.0, f64::max);
        Self { alpha: worst(0), beta: worst(1), ..fallback }
    }

    /// Seconds of a message.
    pub(crate) fn message(&self, bytes: f64) -> f64 {
        self.alpha + bytes * self.beta
    }
}

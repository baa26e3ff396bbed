"""One page that tells what a run did, or what several did: what is on it, and how it is written as HTML."""

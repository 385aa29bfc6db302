"""Why a rank is slow: what changed on its host, GPU or in its data, beside the others.

explain  Why a rank is slow, as far as its records show: what held it up, which phase grew, whether it was running at
         all
signs    What held a rank up, in words with numbers: signs in its vitals that neither healthy ranks nor its own past
         show
"""
